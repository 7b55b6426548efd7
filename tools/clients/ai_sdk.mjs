// The AI SDK's Responses provider does a turn with a tool: its second step refers to items of the first by their ids.
//
//     node ai_sdk.mjs URL FOLDER        FOLDER has node_modules
import { createRequire } from 'node:module'
import { writeFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const [url, folder] = process.argv.slice(2)
const required = createRequire(pathToFileURL(`${folder}/`))
const imported = name => import(pathToFileURL(required.resolve(name)).href)
const { generateText, jsonSchema, stepCountIs, streamText, tool } = await imported('ai')
const { createOpenAI } = await imported('@ai-sdk/openai')

const provider = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'local' })
const inputSchema = jsonSchema({
  type: 'object',
  properties: { path: { type: 'string' }, content: { type: 'string' } },
  required: ['path', 'content'],
})
const write = tool({
  description: 'Writes a file.',
  inputSchema,
  execute: ({ path, content }) => {
    writeFileSync(path, content)
    return 'written'
  },
})
const asked = { model: provider.responses('scripted'), prompt: 'Please SAY aisdk', tools: { write }, stopWhen: stepCountIs(3) }

const whole = await generateText(asked)
const referred = whole.steps.at(-1).request.body.input.filter(item => item.type === 'item_reference')
if (whole.steps.length !== 2 || referred.length === 0) throw new Error(`no second step that refers: ${whole.steps.length}`)
const streamed = streamText({ ...asked, onError: ({ error }) => { throw error } })
let text = ''
for await (const part of streamed.textStream) text += part
if (!text.endsWith(whole.text)) throw new Error(`a stream says ${text}`)
const alone = await generateText({ ...asked, providerOptions: { openai: { store: false } } })
if (alone.text !== whole.text) throw new Error(`without a store it says ${alone.text}`)
console.log(whole.text)
